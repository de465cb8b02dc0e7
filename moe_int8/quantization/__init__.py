"""Weight formats other than ours."""
