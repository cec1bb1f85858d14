"""Platforms that run servers for others, and what each changes in the configuration."""
