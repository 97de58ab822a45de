"""Ray's job and serve interfaces behind the ports of orchestration. Knows HTTP and Ray's words, no database."""
