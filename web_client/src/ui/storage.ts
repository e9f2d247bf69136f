/** Storage of the browser, which may be forbidden or full. */

/**
 * The storage, or null where the browser forbids it.
 *
 * @param open reads it from the window, which is what throws
 */
export function allowedStorage(open: () => Storage | null): Storage | null {
  try {
    return open();
  } catch (error) {
    if (error instanceof DOMException) return null;
    throw error;
  }
}

/** Keep a text under a name; returns whether it could be kept. */
export function kept(storage: Pick<Storage, "setItem"> | null, name: string, text: string) {
  try {
    storage?.setItem(name, text);
    return storage !== null;
  } catch (error) {
    if (error instanceof DOMException) return false; // full, or forbidden after all
    throw error;
  }
}
