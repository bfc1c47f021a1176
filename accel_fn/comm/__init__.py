"""Process groups and what ranks exchange through them."""
