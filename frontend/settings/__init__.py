"""The settings of a model: what there is, where each comes from, how it is read."""
