"""What the tests hold the product against: slow, plain and written from the specification alone."""
