"""Jobs in the form of OpenAI's fine-tuning API."""
