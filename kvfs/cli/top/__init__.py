"""`kvfs top`: figures of a store or a Conductor in a terminal."""
