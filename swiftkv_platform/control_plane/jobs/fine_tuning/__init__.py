"""Jobs in the format of OpenAI's fine-tuning API."""
