"""Accuracy on GSM8K and MMLU: to come."""
