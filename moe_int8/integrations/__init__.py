"""Plugins for serving frameworks, one a file: the only place that knows them. Nothing else imports this package."""
