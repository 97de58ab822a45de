"""The Ray Serve application: replicas of the engine behind `POST /generate`. Knows no control plane and no database."""
