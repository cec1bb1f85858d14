"""The settings of one model, resolved from the sources that `configuration` reads."""
