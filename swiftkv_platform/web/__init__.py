"""ASGI parts that the control plane and the replicas share. Knows no route."""
