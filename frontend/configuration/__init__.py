"""Files and keys, and the one description of a value (`Setting`, `Kind`): no model is known yet."""
