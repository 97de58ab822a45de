"""OpenAI's routes: bodies, answers, and the routes themselves."""
