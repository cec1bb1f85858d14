"""What changes the registry: registration, scaling, snapshots and autoscaling."""
