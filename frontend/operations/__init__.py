"""What clients may ask for, whatever the transport: predictions, and the management of models."""
