"""An exact base and the lossy records after it: writing, reading, applying, removing.

chain_files       where chains lie in a run, and how one is removed
chain_request     what the user wants of a chain, as the agent gets it
chain_document    `chain.json`: leaves, codecs, the digest of the base
chain_record      the bytes of one record
chain_writer      writes base and records
section_coder     the sections of a record
segment           files of records, appended and never changed
chain_listing     which records a chain has
chain_image       the state that readers have
replay            reads a chain back
apply             applies records to the base
apply_on_device   the same on a GPU
apply_threads     the threads that do it
"""
