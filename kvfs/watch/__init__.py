"""What is shown of a running kvfs: figures and tables, their stream of events, and the page that shows them."""
