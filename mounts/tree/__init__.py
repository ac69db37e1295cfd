"""Names, directories and handles as the mount shows them."""
