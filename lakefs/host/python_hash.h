/* The hash that Python has for bytes, with its secret of the process, as a `span_hash`.  Needs no interpreter's lock. */
#ifndef LAKE_PYTHON_HASH_H
#define LAKE_PYTHON_HASH_H

#include <Python.h>

#include "span.h"

static uint64_t hash_by_python(span text)
{
    return (uint64_t)PyHash_GetFuncDef()->hash(text.at, (Py_ssize_t)text.length);
}

#endif
