"""The settings of a model: their sources and their resolution."""
