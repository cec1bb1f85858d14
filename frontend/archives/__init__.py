"""Model archives: where they come from, how they are unpacked, what they require."""
