"""The client of a remote server: any that speaks OpenAI's completions or chat completions."""
