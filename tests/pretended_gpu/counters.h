// What the pretended libraries count. `runtime.cpp` keeps the counts; the other two call it.
#pragma once
#include <cstddef>

extern "C" {
// Counts an event of a kind, such as "launch", and the bytes that it moves.
void pretended_count(const char* kind, const char* name, size_t bytes);

// Writes the counts since the last call to a file, one line "kind TAB name TAB events TAB bytes" each, and clears them.
void pretended_write(const char* path);
}
