"""Accuracy on GSM8K and MMLU, of the model in this process or of any OpenAI-compatible server."""
