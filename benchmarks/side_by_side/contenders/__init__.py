"""The contenders: each module starts one method's processes and measures its steps."""
