"""A small DeepSeek-V3 model that can do something: the data it learns and is tested on, its training, its files."""
