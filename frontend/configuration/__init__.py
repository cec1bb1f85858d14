"""What operators configure: keys and values, and the files they stand in."""
