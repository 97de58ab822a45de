"""Tool calling: fields of requests, parsing of calls in answers, and grammars that make calls valid."""
