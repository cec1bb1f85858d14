"""What is offered over HTTP: inference, management, KServe, OIP, metrics, OpenAPI."""
