"""What requests are made into: images and words; and threads that do it side by side."""
