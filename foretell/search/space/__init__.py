"""Which plans there are: `layouts` generates them, `constraints` are the user's, `fill` makes one whole, `explore` goes through them."""
