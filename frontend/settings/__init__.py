"""The values of one model: which of the sources that `configuration` reads is in force."""
