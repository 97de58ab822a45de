"""`swiftkv doctor`: one module a check, all of them in `checks.py`. A check changes nothing that it does not remove."""
