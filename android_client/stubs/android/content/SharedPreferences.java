package android.content;

public interface SharedPreferences {
    SharedPreferences.Editor edit();

    boolean getBoolean(String text, boolean on);

    int getInt(String text, int value);

    String getString(String text0, String text1);

    public interface Editor {
        void apply();

        SharedPreferences.Editor clear();

        SharedPreferences.Editor putBoolean(String text, boolean on);

        SharedPreferences.Editor putInt(String text, int value);

        SharedPreferences.Editor putString(String text0, String text1);

        SharedPreferences.Editor remove(String text);
    }
}
