"""A tiny MLA model that solves word problems: generator, tokenizer, trainer."""
