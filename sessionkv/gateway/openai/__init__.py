"""OpenAI's APIs: Chat Completions, Completions, Models."""
