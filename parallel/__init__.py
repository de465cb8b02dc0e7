"""Process groups and parallel layers."""
