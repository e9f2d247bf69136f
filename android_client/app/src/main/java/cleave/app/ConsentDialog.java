package cleave.app;

import android.app.Activity;
import android.app.AlertDialog;
import cleave.core.JoinLink;

/** Asks the owner before the phone joins: which server, and how it is known to be that one. */
final class ConsentDialog {
    private static final int DIGITS_IN_A_GROUP = 4;
    private static final String SHA256 = "sha256:";

    private ConsentDialog() {}

    static void show(Activity activity, JoinLink link, Runnable agreed) {
        new AlertDialog.Builder(activity)
                .setTitle(activity.getString(R.string.consent_title, link.host))
                .setMessage(text(activity, link))
                .setPositiveButton(R.string.yes, (dialog, which) -> agreed.run())
                .setNegativeButton(R.string.no, null)
                .show();
    }

    private static String text(Activity activity, JoinLink link) {
        String body = activity.getString(R.string.consent_body, link.origin());
        return body + "\n\n" + identity(activity, link);
    }

    private static String identity(Activity activity, JoinLink link) {
        if (!link.isSecure) {
            return activity.getString(R.string.consent_plain);
        }
        return link.fingerprint.isEmpty()
                ? activity.getString(R.string.consent_verified)
                : activity.getString(R.string.consent_pinned, grouped(link.fingerprint));
    }

    /** The digits in groups, to be compared by eye. */
    private static String grouped(String fingerprint) {
        String digits = fingerprint.substring(SHA256.length());
        StringBuilder groups = new StringBuilder(SHA256);
        for (int at = 0; at < digits.length(); at += DIGITS_IN_A_GROUP) {
            groups.append(' ').append(digits, at, at + DIGITS_IN_A_GROUP);
        }
        return groups.toString();
    }
}
