"""Context parallelism: attention over sequences that are split over the ranks of a group.

layout.py           which rows of a sequence each rank holds, and how to slice a batch
whole_documents.py  a layout of packed documents that cuts as few as balanced ranks allow
blocks.py           which pieces of queries attend to which pieces of keys, as dense kernel calls
rule.py             what is computed: documents, visibility, scale and bias
merge.py            computes those calls, merges their results and adds their gradients
exchange.py         the autograd function around an exchange of keys and values
ring.py             keys and values travel from rank to rank: ring and double ring
all_gather.py       every rank gathers all keys and values
ulysses.py          all-to-all: whole sequences for a part of the heads, and back
attention.py        the algorithms behind one function: `context_attention`
"""
