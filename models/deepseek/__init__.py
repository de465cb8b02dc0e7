"""DeepSeek V3, R1, V3.1, V2 and V2-Lite."""
