"""Bytes from memory to storage.

sink             a directory or a bucket, as one interface
writer           direct writes by several threads, each block checksummed
writer_threads   those threads, kept between checkpoints
buffered         buffered writes that do not flood the page cache
tuning           how many threads and how large writes pay
upload           the same for a bucket
"""
