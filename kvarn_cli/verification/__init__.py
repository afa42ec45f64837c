"""`kvarn verify`: is a converted folder whole, and does it hold what its metadata says?"""
