"""The Ray Serve application: replicas of the engine behind HTTP routes. Knows no control plane and no database."""
