"""Who runs in the next step, and with how many tokens. Plain Python over ids."""
