/** The way from the page into Android's app. */

/** A link that the app opens to join as the page at `address` would. */
export function appLink(address: string): string {
  return `cleave://join?url=${encodeURIComponent(address)}`;
}

/** Whether a browser runs where the app could be, in its own words. */
export function onAndroid(userAgent: string): boolean {
  return userAgent.includes("Android");
}
