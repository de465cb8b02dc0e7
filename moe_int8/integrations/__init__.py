"""Plugins for serving frameworks: to come. Nothing else in the project imports this package."""
