"""The contenders: each module starts one kind of processes, and has its steps measured."""
