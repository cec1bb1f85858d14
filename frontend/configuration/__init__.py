"""What the operator says: keys and values, the files they stand in, how they settle."""
