"""Models built from the operators of `moe_int8` and the layers of `moe_int8.parallel`."""
