"""INT8 (w8a8) inference of DeepSeek V3/R1."""
