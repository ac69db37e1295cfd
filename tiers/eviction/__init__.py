"""What a full tier evicts, what a lower one admits, and how much room each uid may have. Pure policy."""
