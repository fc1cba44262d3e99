"""The control plane: REST /v1 and gRPC FleetService."""
