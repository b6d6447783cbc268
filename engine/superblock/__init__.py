"""What the store is: identity, lock, clean stop, features, reserve, token, first key."""
